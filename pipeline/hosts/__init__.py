"""The hosts among which processes are divided: this one, and others that a command prefix such as srun's reaches."""

from pipeline.hosts.agreement import linked_as, links, others, refuse_differences, slowest_link
from pipeline.hosts.allocation import NAME, address, idle_nodes, interface_to, names, use
from pipeline.hosts.helper import Host, Rank, serve

__all__ = [
    "NAME",
    "Host",
    "Rank",
    "address",
    "idle_nodes",
    "interface_to",
    "linked_as",
    "links",
    "names",
    "others",
    "refuse_differences",
    "serve",
    "slowest_link",
    "use",
]
