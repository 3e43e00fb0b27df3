"""What a cluster is asked: topics, offsets, groups, transactions, rights."""
