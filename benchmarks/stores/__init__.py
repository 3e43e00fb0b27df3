"""Stores by themselves: tables in memory and on engines, folders, snapshots. No broker."""
