"""The decode worker: pulls the KV of a prompt and writes the rest, or does both phases itself."""

from decode_worker.worker import DecodeWorker

__all__ = ["DecodeWorker"]
