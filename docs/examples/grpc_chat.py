"""Talks to pdserve over gRPC: a chat as a stream, with a deadline, and what errors look like.

    python docs/examples/grpc_chat.py "Name three rivers."
    python docs/examples/grpc_chat.py --address 127.0.0.1:8001 --timeout 5 --key "$KEY" "Hi"

The stubs are those of the package (`rpc`); for another language, make them from
proto/inference.proto, or ask the server, which has reflection.
"""

import argparse
import sys

import grpc

from rpc import inference_pb2 as pb
from rpc import inference_pb2_grpc


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:8001", help="the router's gRPC address")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for the whole answer")
    parser.add_argument("--key", help="an API key, where the router asks for one")
    parser.add_argument("--max-tokens", type=int, help="default: the rest of the context")
    args = parser.parse_args()
    metadata = [("authorization", f"Bearer {args.key}")] if args.key else []
    with grpc.insecure_channel(args.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            models = stub.Models(pb.ModelsRequest(), timeout=args.timeout, metadata=metadata)
            request = pb.ChatRequest(
                model=models.models[0].id,
                messages=[pb.ChatMessage(role="user", content=args.prompt)],
                max_tokens=args.max_tokens,
                temperature=0,
            )
            # Past the deadline, or after call.cancel(), the workers drop the request at once.
            call = stub.Chat(request, timeout=args.timeout, metadata=metadata)
            for message in call:
                print(message.content, end="", flush=True)
                if message.finish_reason:
                    print(f"\n[{message.finish_reason}]")
                if message.HasField("usage"):
                    print(f"[{message.usage.completion_tokens} tokens]")
        except grpc.RpcError as error:
            # The status says what to do (RESOURCE_EXHAUSTED: come back later), the trailing
            # metadata what was wrong: pdserve-param names the field, retry-after the seconds.
            details = dict(error.trailing_metadata() or ())
            print(f"\n{error.code().name}: {error.details()} {details}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
