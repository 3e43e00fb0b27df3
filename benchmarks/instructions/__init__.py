"""What one event costs, counted: executed bytecodes, calls and instructions, without a broker and without a clock."""
