from autotune.cli.main import main

if __name__ == "__main__":  # compiling processes import this file too
    main()
