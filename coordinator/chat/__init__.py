"""Chat: messages to a prompt's ids by the model file's template, and an answer's reasoning told apart.

Nothing is imported here: the process that renders templates starts in a few hundredths of a second because of that.
"""
