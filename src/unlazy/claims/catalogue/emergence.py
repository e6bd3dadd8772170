"""The claims of the emergence paper."""

from unlazy.claims.catalogue.claim import Claim

EMERGENCE: tuple[Claim, ...] = (
    Claim(
        id="B1",
        paper="emergence",
        where="Lemma 4",
        statement=(
            "For pattern data whose label depends on the number of relevant patterns among k, an explicit "
            "two-layer network of 3(k+1) truncated-ReLU neurons, all along the sum of the relevant patterns, "
            "has zero hinge loss with outer weights of at most 32k and biases between 1/(32k) and 1/2 in "
            "size."
        ),
        paper_value="exact",
        study="lemmas",
    ),
    Claim(
        id="B2",
        paper="emergence",
        where="Sec. 5",
        statement=(
            "With the mirrored initialisation the network is zero everywhere, and the first gradient of each "
            "neuron is minus its outer weight times the mean of label times input times activation slope."
        ),
        paper_value="exact",
        study="lemmas",
    ),
    Claim(
        id="B3",
        paper="emergence",
        where="Lemma 5",
        statement=(
            "The first gradient step has nearly equal components along all relevant patterns and much "
            "smaller ones along the others."
        ),
        paper_value="about beta gamma / sigma~ inside, much smaller outside",
        study="lemmas",
    ),
    Claim(
        id="B4",
        paper="emergence",
        where="Lemma 6",
        statement=(
            "The ratio of the largest gradient component along an irrelevant pattern to the mean component "
            "along the relevant ones is smaller in the second step than in the first."
        ),
        paper_value="strictly smaller",
        study="lemmas",
    ),
    Claim(
        id="B5",
        paper="emergence",
        where="Fig. 2",
        statement=(
            "After two gradient steps on structured parity data the weight vector of every neuron has an "
            "absolute cosine above 0.99 with the sum of the relevant patterns."
        ),
        paper_value="above 0.99",
        study="weights",
    ),
    Claim(
        id="B6",
        paper="emergence",
        where="Sec. 6",
        statement=(
            "A classifier trained on the neurons after one step is near chance on structured parity data, "
            "and one trained on the neurons after two steps is near perfect."
        ),
        paper_value="about 52 / about 100 % test",
        study="weights",
    ),
    Claim(
        id="B7",
        paper="emergence",
        where="Fig. 1",
        statement="A trained two-layer network reaches nearly 100 % test accuracy on structured parity data.",
        paper_value="near 100 % test",
        study="fixed-features",
    ),
    Claim(
        id="B8",
        paper="emergence",
        where="Fig. 1",
        statement=(
            "On structured parity data the same network linearised at initialisation and random features "
            "with a trained readout stay clearly below the trained network in test accuracy."
        ),
        paper_value="clearly lower; no number",
        study="fixed-features",
    ),
    Claim(
        id="B9",
        paper="emergence",
        where="Fig. 1",
        statement=(
            "On parity data whose inputs carry no structure the trained network, its linearisation and "
            "random features all stay near chance."
        ),
        paper_value="near 50 % test",
        study="fixed-features",
    ),
    Claim(
        id="B10",
        paper="emergence",
        where="Thm 2",
        statement=(
            "Whatever N fixed features with values in [-1, 1] and readout of norm at most B are taken, some "
            "choice of k relevant patterns among D (k odd, 3 < k <= D/16) gives structured parity data on "
            "which the hinge loss is at least p_o (1 - sqrt(2N) B / 2^k), p_o being the share of "
            "unstructured inputs."
        ),
        paper_value="bound never violated",
        study="fixed-features",
    ),
    Claim(
        id="B11",
        paper="emergence",
        where="Fig. 3",
        statement=(
            "The first-layer weights of a two-layer network trained to tell MNIST digits 0 and 1 apart "
            "gather into two clusters of direction within the first steps."
        ),
        paper_value="two clusters; no number",
        study="clusters",
    ),
    Claim(
        id="B12",
        paper="emergence",
        where="Fig. 4",
        statement=(
            "A student trained on teacher-labelled natural images mixed with Gaussian noise learns the noise "
            "part worse than the image part, and the whole worse than a network trained on the images alone."
        ),
        paper_value="ordering; strong on CIFAR-10 and SVHN, weak on MNIST",
        study="teacher-student",
    ),
)
