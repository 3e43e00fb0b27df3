"""A journal beside a transactional loop by hand, and beside plain records that are acknowledged one by one."""
