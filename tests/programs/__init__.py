"""One generator of programs: what regions must do is that which plain autograd does, or an error of the contract.

`program` is a program as data, `strategy` draws one, `running` runs it, `kept` counts bytes, `outcome` judges it.
`make soak SECONDS=600` draws fresh programs.
"""
