"""Events that take time of their own: work ahead of its turn, beside a hand-written asyncio loop and quixstreams."""
