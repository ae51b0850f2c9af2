"""One line in a worker's log for each attempt, under the names that it has outside."""

import logging

import grpc

from core.logs import about
from core.types import GenerationRequest

logger = logging.getLogger(__name__)


def log_attempt(phase: str, request: GenerationRequest, context: grpc.aio.ServicerContext) -> None:
    """Joins the attempt to the client's request id and to its trace (W3C traceparent), which the
    router sends along as metadata."""
    metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
    logger.info(
        "%s of attempt %s: request %s, trace %s, %d tokens",
        phase, request.request_id, request.client_request_id or "-",
        metadata.get("traceparent", "-"), len(request.token_ids),
        extra=about(
            request_id=request.client_request_id, attempt_id=request.request_id, phase=phase,
            traceparent=metadata.get("traceparent", ""), num_tokens=len(request.token_ids),
        ),
    )  # fmt: skip
