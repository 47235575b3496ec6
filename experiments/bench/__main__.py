"""python -m experiments.bench"""

from .app import main

if __name__ == "__main__":
    main()
