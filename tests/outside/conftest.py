"""The stranger's files are run by a process of their own: importing one here would register its layer."""

collect_ignore = ["stranger"]
