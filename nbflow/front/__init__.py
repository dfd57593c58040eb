"""A server's address, kept by a process outside of its ranks, so that it outlives them.

`front` listens and hands every connection to `connection`, which passes requests on to rank 0 over
a private socket and answers what rank 0 cannot; `messages` knows where heads, bodies and chunks of
HTTP/1.1 begin and end, `answers` what is said when there is nobody behind.  Standard library only.
"""
