"""The prefill worker: reads prompts, samples the first token, keeps the KV for a decode worker."""

from prefill_worker.worker import PrefillWorker

__all__ = ["PrefillWorker"]
