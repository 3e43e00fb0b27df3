"""The threads that read logs: input, changelogs and the topics of views."""
