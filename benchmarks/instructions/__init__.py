"""The cost of one event, counted: executed bytecodes, calls and instructions, without a broker and without a clock."""
