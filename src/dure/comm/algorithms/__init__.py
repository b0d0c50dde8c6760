"""All-reduce algorithms: one file each, a table of them, and how one is opened.

Those over a wire have the same two functions: `all_reduce(wire, vector, op)`, whose phases can be followed message by
message, and `sent_elements(num_elements, world_size)`, the exact number of elements that each rank sends. What comes
out is the same bit by bit on every rank: either all take the bits that one rank computed, or all add in the same order.
"""
