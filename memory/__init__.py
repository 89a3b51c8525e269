"""Where: checkpoint files, the host arena of expert records, device slots and who lives in them, KV pages.

- `checkpoint`, `header`, `regular_file`, `reader`, `errors`: model folders, their files, and what is wrong with them
- `records`, `arena`, `arena_space`, `host_limits`, `budget`: expert records in host memory, and how many fit
- `store`, `slots`, `waves`, `copies`, `outcome`: experts in device slots, served, copied and counted
- `policy`, `replay`: which expert goes first, and the same decisions offline
- `kv_pages`: paged KV
"""
