"""The floor that coordinator, workers and launch stand on: facts, messages, codec, channel. No torch here."""
