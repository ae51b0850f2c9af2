"""Names and buckets of the Prometheus metrics, so that every process and dashboard agrees."""

TTFT = "pdserve_time_to_first_token_seconds"
TPOT = "pdserve_time_per_output_token_seconds"
ITL = "pdserve_inter_token_latency_seconds"
E2E = "pdserve_request_duration_seconds"
QUEUE_TIME = "pdserve_queue_time_seconds"
KV_TRANSFER_SECONDS = "pdserve_kv_transfer_seconds"
KV_TRANSFER_BYTES = "pdserve_kv_transfer_bytes_total"
PREFIX_HIT_TOKENS = "pdserve_prefix_cache_hit_tokens_total"
KV_BLOCKS = "pdserve_kv_blocks"
REQUESTS_RUNNING = "pdserve_requests_running"
REQUESTS_WAITING = "pdserve_requests_waiting"
REQUESTS = "pdserve_requests_total"
RETRIES = "pdserve_retries_total"
REJECTIONS = "pdserve_rejections_total"
DECISIONS = "pdserve_decisions_total"
PROMPT_TOKENS = "pdserve_prompt_tokens_total"
OUTPUT_TOKENS = "pdserve_generation_tokens_total"
SLO_REQUESTS = "pdserve_slo_requests_total"
SLO_TARGET = "pdserve_slo_target_seconds"
# The same times again, by the worker that they were spent on.
WORKER_TTFT = "pdserve_worker_time_to_first_token_seconds"
WORKER_ITL = "pdserve_worker_inter_token_latency_seconds"
WORKER_TPOT = "pdserve_worker_time_per_output_token_seconds"
WORKER_QUEUE_TIME = "pdserve_worker_queue_time_seconds"
WORKER_PREFILL_SECONDS = "pdserve_worker_prefill_seconds"
WORKER_KV_TRANSFER_SECONDS = "pdserve_worker_kv_transfer_seconds"

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300,
)  # fmt: skip
