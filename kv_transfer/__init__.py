"""Moves KV blocks between workers: one contract (`base.KVTransfer`), one file per transport."""
