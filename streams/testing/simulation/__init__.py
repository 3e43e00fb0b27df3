"""A broker, a group and clients made of Python objects, and a loop whose clock jumps: the real engine runs on
them.

Nothing in here waits for real, and all chance comes from one seed, so that what happened can be made to happen again.
"""
