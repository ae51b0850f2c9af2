"""A worker that can be either: both kinds of services around one engine."""

from dual_worker.worker import DualWorker

__all__ = ["DualWorker"]
