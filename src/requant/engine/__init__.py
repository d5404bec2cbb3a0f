"""From requests to tokens: scheduling, paged KV cache, model runner, sampling, and the front end around them."""
