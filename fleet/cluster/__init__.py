"""Where the nodes of a run come from: this machine, virtual machines, or Kubernetes."""
