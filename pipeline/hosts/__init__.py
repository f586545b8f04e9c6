"""The hosts among which processes are divided: this one, and others that a command prefix such as srun's reaches."""

from pipeline.hosts.agreement import links, others, refuse_differences
from pipeline.hosts.allocation import NAME, idle_nodes, interface_to, names, server, use
from pipeline.hosts.helper import Host, Rank, serve, started
