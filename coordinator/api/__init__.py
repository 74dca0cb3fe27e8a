"""The remote API: what clients ask over zmq, decided without I/O (`remote`), and the loop that serves them."""
