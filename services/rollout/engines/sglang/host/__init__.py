"""The program that runs SGLang's engine, in the environment that has it."""
