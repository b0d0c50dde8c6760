"""All-reduce algorithms: one file each, a table, and a function that opens one.

Algorithms over a wire have the same two functions. `all_reduce(wire, vector, op)` has phases that can be followed
message by message. `sent_elements(num_elements, world_size)` is the exact number of elements that each rank sends. The
result is bit-identical on every rank: either all use the bits that one rank computed, or all add in the same order.
"""
