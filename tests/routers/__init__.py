"""Many nodes behind routers that others wrote: vllm-router and sglang-router, from their packages."""
