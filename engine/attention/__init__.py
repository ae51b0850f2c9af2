"""One contract (`base.AttentionBackend`), one file per backend."""
