"""All requests in one log of ticks: sessions, the slots they hold, and what is put into the log next. No I/O."""
