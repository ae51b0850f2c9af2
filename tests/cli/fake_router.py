"""`python -m fake_router`: a router without workers or a model, for tests of the command."""

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from core.config import load_config

CLUSTER = {
    "controller": "127.0.0.1:7",
    "controller_reachable": True,
    "workers": [
        {
            "id": "prefill-0",
            "role": "prefill",
            "host": "127.0.0.1",
            "pid": 4242,
            "address": "127.0.0.1:50051",
            "state": "ready",
            "incarnation": "abc",
            "transport": "nixl (cma)",
            "kv_blocks": {"total": 100, "free": 80, "cached": 13, "running": 4, "held": 2,
                          "awaiting": 1},
            "compatibility": {"model": "a", "block_size": "16"},
            "requests_running": 3,
            "requests_waiting": 5,
            "tokens_prefilled_total": 12345,
            "tokens_decoded_total": 0,
            "kv_bytes_sent_total": 2_500_000,
        },
        {"id": "decode-0", "role": "decode", "state": "starting",
         "detail": "waiting for resources"},
    ]
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """Answers as the router would, to the requests that the command makes."""

    def do_GET(self) -> None:
        answers = {
            "/health": {},
            "/ready": {},
            "/cluster": CLUSTER,
            "/v1/models": {"object": "list", "data": [{"id": "fake"}]},
        }
        if self.path in answers:
            self._send(200, "application/json", json.dumps(answers[self.path]).encode())
        else:
            self._send(404, "application/json", b'{"error": {"message": "no such route"}}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body["messages"][-1]["content"]
        if said == "refuse":
            error = {"error": {"message": "max_tokens: too many"}}
            self._send(400, "application/json", json.dumps(error).encode())
            return
        events = [{"choices": [{"delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"delta": {"content": word}}]} for word in ("You ", "said ", said)]
        if said == "fail":
            events.append({"error": {"message": "the decode worker was lost"}})
        lines = [json.dumps(event) for event in events]
        if said not in ("fail", "break"):
            lines.append("[DONE]")
        stream = "".join(f"data: {line}\n\n" for line in lines)
        self._send(200, "text/event-stream", f": comment\n\n{stream}".encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--controller", required=True)
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.set)
    if config.served_model_name == "refused":
        sys.exit("pdserve: error: router: this name is refused")
    host, _, port = config.router.http.rpartition(":")
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
