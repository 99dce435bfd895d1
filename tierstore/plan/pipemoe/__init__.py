"""PipeMoE's question in a plan: in how many chunks a layer's experts are passed, by three solvers side by side."""
