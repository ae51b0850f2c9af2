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

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300,
)  # fmt: skip
