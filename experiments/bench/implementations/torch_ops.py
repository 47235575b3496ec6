"""What one would write in plain torch: SDPA over gathered KV, and indexing for what moves."""



