"""The claims of the three papers as data: what is claimed, where, and which study judges it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One statement that a study finds to hold, to hold partly, or to fail.

    id: short name. C1, C2, ... and F1, F2, ... belong to the half-space paper (F: failure cases and checks
        named in its published summary), B1, ... to the emergence paper, L1, ... to the tangent paper.
    paper: "half-space" (Half-Space Feature Learning in Neural Networks), "emergence" (A Theoretical Analysis
        on Feature Learning in Neural Networks) or "tangent" (An Adaptive Tangent Feature Perspective of
        Neural Networks).
    where: the theorem, figure, table or section that makes the claim, or the kind of source.
    statement: the claim in one sentence of our own that can be true or false.
    paper_value: what the paper gives or implies, in a few words; "no number" where it gives none.
    study: the name of the study that judges it.
    """

    id: str
    paper: str
    where: str
    statement: str
    paper_value: str
    study: str


CATALOGUE: tuple[Claim, ...] = (
    # Half-space paper: identities and geometry.
    Claim(
        id="C1",
        paper="half-space",
        where="Thm 1",
        statement=(
            "The output of a ReLU network without biases equals the sum, over all paths through its hidden "
            "units, of the product of the gates on the path times the linear function given by the weights "
            "on the path."
        ),
        paper_value="exact",
        study="theorems",
    ),
    Claim(
        id="C2",
        paper="half-space",
        where="Thm 2",
        statement=(
            "The output of a deep linearly gated network (DLGN), with linear or with constant experts, and "
            "that of a deep linear network equal the same kind of sum over paths of gate times expert."
        ),
        paper_value="exact",
        study="theorems",
    ),
    Claim(
        id="C3",
        paper="half-space",
        where="Sec. 3.2",
        statement=(
            "For ReLU networks and DLGNs the number of paths active on both of two inputs equals the product "
            "over layers of the number of units open on both."
        ),
        paper_value="exact",
        study="theorems",
    ),
    Claim(
        id="C4",
        paper="half-space",
        where="Sec. 2, Fig. 1 left",
        statement=(
            "The set of inputs on which a path is active is always convex in a DLGN, but can fall into "
            "several separate pieces in a ReLU network."
        ),
        paper_value="always convex; ReLU example [0.5, 1.5] and [2.5, 3.5]",
        study="theorems",
    ),
    Claim(
        id="C5",
        paper="half-space",
        where="Fig. 1 right",
        statement=(
            "An arbitrarily small change of the parameters can make the active region of a path jump in a "
            "ReLU network, whereas the half-space normals of a DLGN move continuously with the parameters."
        ),
        paper_value="constructed example: half-plane to quadrant",
        study="theorems",
    ),
    Claim(
        id="C6",
        paper="half-space",
        where="Sec. 3.1",
        statement=(
            "The active region of one path is a union of exactly 2^((m-1)(L-1)) regions of constant "
            "activation pattern, some of them possibly empty, for L-1 hidden layers of m units."
        ),
        paper_value="exact count 2^((m-1)(L-1))",
        study="theorems",
    ),
    # Half-space paper: the circle.
    Claim(
        id="C7",
        paper="half-space",
        where="Fig. 2",
        statement=(
            "On the circle target (a slow wave on the top half, a fast wave on the bottom half) a ReLU "
            "network and a DLGN with trained gates both bring the squared loss below 0.01 in about 200 "
            "epochs."
        ),
        paper_value="about 200 epochs",
        study="circle",
    ),
    Claim(
        id="C8",
        paper="half-space",
        where="Fig. 2",
        statement=(
            "On the circle target a DLGN whose random gates are frozen needs more than 2000 epochs to bring "
            "the loss below 0.01, at least ten times as many as with trained gates."
        ),
        paper_value="more than 2000 epochs",
        study="circle",
    ),
    Claim(
        id="C9",
        paper="half-space",
        where="Fig. 3",
        statement=(
            "After three epochs on the circle target the loss has fallen from about 0.5 to about 0.25, and "
            "the ReLU network and the DLGN already have clearly more active paths on the slow top half than "
            "on the fast bottom half."
        ),
        paper_value="loss about 0.25; top / bottom ratio clearly above 1",
        study="circle",
    ),
    Claim(
        id="C10",
        paper="half-space",
        where="Fig. 3",
        statement=(
            "On the circle target the overlap kernel after three epochs is close to the one after 200 "
            "epochs, and both are far from the overlap kernel at initialisation."
        ),
        paper_value="same structure at epochs 3 and 200; no number",
        study="circle",
    ),
    Claim(
        id="C11",
        paper="half-space",
        where="Fig. 4",
        statement=(
            "During training on the circle target the empirical tangent kernel moves far from its initial "
            "value instead of staying constant, and has done so by epoch 3."
        ),
        paper_value="visibly different by epoch 3; no number",
        study="circle",
    ),
    Claim(
        id="C12",
        paper="half-space",
        where="Fig. 5",
        statement=(
            "Networks with trained gates fit the slow half of the circle target within a few epochs, while "
            "the fast half needs more than 100 epochs."
        ),
        paper_value="a few epochs against more than 100",
        study="circle",
    ),
    Claim(
        id="C13",
        paper="half-space",
        where="Fig. 5",
        statement=(
            "A DLGN with frozen random gates still leaves a high-frequency error on the slow half of the "
            "circle target after 8000 epochs."
        ),
        paper_value="artefacts visible at 8000 epochs; no number",
        study="circle",
    ),
    Claim(
        id="C14",
        paper="half-space",
        where="Figs 6, 9, 10",
        statement=(
            "Training on the circle target turns most last-layer units of a DLGN into half-planes close to "
            "the slow top half, and the share of such units grows with the layer and with training."
        ),
        paper_value="3 of the 4 units shown",
        study="circle",
    ),
    Claim(
        id="C15",
        paper="half-space",
        where="abstract, Fig. 6",
        statement=(
            "Training on the circle target makes the half-space normals of a DLGN gather around common "
            "directions, in later layers more than in earlier ones."
        ),
        paper_value="later layers more clustered; no number",
        study="circle",
    ),
    # Half-space paper: relabelled Fashion-MNIST.
    Claim(
        id="C16",
        paper="half-space",
        where="Figs 7, 11, 12",
        statement=(
            "On Fashion-MNIST with five classes kept (easy) and five split into groups with random labels "
            "(hard), a DLGN and a ReLU network have more active paths on the easy than on the hard images "
            "throughout training."
        ),
        paper_value="easy / hard ratio above 1 for both networks",
        study="fashion",
    ),
    Claim(
        id="C17",
        paper="half-space",
        where="Fig. 7 middle",
        statement=(
            "On the same relabelled Fashion-MNIST the mean diagonal of the tangent kernel becomes larger on "
            "the easy images than on the hard ones."
        ),
        paper_value="ratio above 1 (2.7 for ReLU in mid-training)",
        study="fashion",
    ),
    Claim(
        id="C18",
        paper="half-space",
        where="Sec. 5.1, appendix",
        statement=(
            "On the same relabelled Fashion-MNIST the accuracy on the easy classes rises first: it is near "
            "its final value while the hard classes are still mostly unlearned."
        ),
        paper_value="easy about 72 % in mid-training, about 85 % at the end",
        study="fashion",
    ),
    Claim(
        id="C19",
        paper="half-space",
        where="Figs 13-16",
        statement=(
            "On the same relabelled Fashion-MNIST the class-averaged kernels are nearly constant at "
            "initialisation and show blocks of easy and hard classes later in training."
        ),
        paper_value="initial spread below about 1 %, blocks later",
        study="fashion",
    ),
    # Half-space paper: convolutional and residual networks.
    Claim(
        id="C20",
        paper="half-space",
        where="Table 1",
        statement=(
            "Five-layer convolutional networks with ReLU, with linear gating and with linear gating and "
            "constant experts reach test accuracies on CIFAR-10 that lie within about one point of each "
            "other."
        ),
        paper_value="72.2 / 73.2 / 72.2 % test",
        study="table1",
    ),
    Claim(
        id="C21",
        paper="half-space",
        where="Table 1",
        statement=(
            "A deep linear convolutional network of the same layout stays far behind the three gated ones in "
            "test accuracy on CIFAR-10."
        ),
        paper_value="40.8 % test",
        study="table1",
    ),
    Claim(
        id="C22",
        paper="half-space",
        where="Table 1",
        statement=(
            "On CIFAR-10 the linearly gated convolutional network ends with a lower training accuracy than "
            "the ReLU network although their test accuracies are about equal."
        ),
        paper_value="85.3 against 96.3 % train",
        study="table1",
    ),
    Claim(
        id="C23",
        paper="half-space",
        where="text beside Table 1",
        statement=(
            "A linear model on the tangent features of the untrained convolutional network stays far behind "
            "the ReLU network and both linearly gated networks in test accuracy on CIFAR-10."
        ),
        paper_value="wide margin; no number",
        study="table1",
    ),
    Claim(
        id="C24",
        paper="half-space",
        where="Table 2",
        statement=(
            "Linearly gated versions of ResNet-34 and ResNet-110 lie about five to six points below the ReLU "
            "versions in test accuracy on CIFAR-10 and CIFAR-100."
        ),
        paper_value="CIFAR-10 / CIFAR-100: 5.0 / 5.1 points (ResNet-34), 5.0 / 6.0 points (ResNet-110)",
        study="table2",
    ),
    Claim(
        id="C25",
        paper="half-space",
        where="text beside Table 1",
        statement=(
            "Replacing the linear experts of a DLGN by constant experts changes its test accuracy by less "
            "than about one point."
        ),
        paper_value="indistinguishable on most data; 73.2 against 72.2 % in Table 1",
        study="table1",
    ),
    Claim(
        id="C26",
        paper="half-space",
        where="Sec. 3.2",
        statement=(
            "With frozen gates and one free constant per path, least squares on the path features and kernel "
            "regression with the overlap kernel give the same predictions."
        ),
        paper_value="exact",
        study="theorems",
    ),
    # Half-space paper: its thesis, taken apart.
    Claim(
        id="C27",
        paper="half-space",
        where="thesis",
        statement=(
            "The gates are finished early: copied when the circle loss rests near 0.25, frozen, and given "
            "fresh experts to train, they reach what the gates from the end of training reach."
        ),
        paper_value="implied by epochs 3 and 200 looking alike; no number",
        study="features-finished",
    ),
    Claim(
        id="C28",
        paper="half-space",
        where="hypothesis",
        statement=(
            "Most of the change of the tangent kernel during training is due to the moving gates, that is to "
            "the moving regions of active paths, and not to the changing weights on the paths."
        ),
        paper_value="hypothesis; no number",
        study="kernel-attribution",
    ),
    Claim(
        id="C29",
        paper="half-space",
        where="text on the circle",
        statement=(
            "That the slow half of the circle target is learned first is not just the spectral bias of a "
            "fixed kernel: the network linearised at initialisation does not show the same lead."
        ),
        paper_value="implied; no number",
        study="spectral-bias",
    ),
    # Half-space paper: failure cases and further checks.
    Claim(
        id="F1",
        paper="half-space",
        where="published summary",
        statement=(
            "At a fixed width a DLGN fails to fit the circle target once the frequency on its fast half is high."
        ),
        paper_value="named as a failure; no number",
        study="failures",
    ),
    Claim(
        id="F2",
        paper="half-space",
        where="published summary",
        statement=(
            "A DLGN fails on labels that depend on a strongly non-linear interaction of inputs, such as the "
            "exclusive-or of several coordinates."
        ),
        paper_value="named as a failure; no number",
        study="failures",
    ),
    Claim(
        id="F3",
        paper="half-space",
        where="published summary",
        statement=(
            "A DLGN overfits small data sets: its gap between training and test accuracy is large with few "
            "examples and closes as examples are added."
        ),
        paper_value="named as a failure; no number",
        study="failures",
    ),
    Claim(
        id="F4",
        paper="half-space",
        where="published summary, experiment 3",
        statement=(
            "With the same number of parameters, gates that are quadratic in the input reach a higher "
            "accuracy than linear gates."
        ),
        paper_value="comparison proposed; no number",
        study="quadratic",
    ),
    Claim(
        id="F5",
        paper="half-space",
        where="published summary, check 3",
        statement=("A DLGN takes more time and memory to train and to run than a ReLU network of the same layout."),
        paper_value="no number; about twice the parameters by construction",
        study="table1",
    ),
    Claim(
        id="F6",
        paper="half-space",
        where="published summary, check 1",
        statement=(
            "When the slow and the fast half of the circle target are swapped in mid-training, networks with "
            "trained gates move their active paths to the new slow half and recover their loss, and a "
            "network with frozen gates does not."
        ),
        paper_value="check proposed; no number",
        study="swap",
    ),
    # Emergence paper.
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
        paper_value="clearly lower; the correlated part alone allows about 75 %",
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
    # Tangent paper.
    Claim(
        id="L1",
        paper="tangent",
        where="Thm 1",
        statement=(
            "Minimising jointly over the coefficients and an unrestricted linear transformation of the "
            "tangent features, with a spectral penalty on the latter, has the closed-form optimum made of "
            "the min-norm solution and one stretched direction."
        ),
        paper_value="equality",
        study="adaptive",
    ),
    Claim(
        id="L2",
        paper="tangent",
        where="Thm 1",
        statement=(
            "Adapting the tangent features by an unrestricted linear transformation leaves the fitted "
            "function equal to the min-norm fit with the original features."
        ),
        paper_value="exact",
        study="adaptive",
    ),
    Claim(
        id="L3",
        paper="tangent",
        where="Thm 2",
        statement=(
            "With one left and one right transformation per layer the joint cost of a given update matrix, "
            "minimised over all its factorisations, equals an effective penalty summed over its singular "
            "values, and the optimal transformations follow from its singular vectors."
        ),
        paper_value="equality (for fixed update matrices)",
        study="adaptive",
    ),
    Claim(
        id="L4",
        paper="tangent",
        where="Fig. 2",
        statement=(
            "The effective penalties that adaptation induces behave like v^2 near zero and grow more slowly "
            "than v^2 for large v."
        ),
        paper_value="0.670 / 0.890 / 0.669 at v = 1, 6.247 / 4.526 / 3.367 at v = 5",
        study="penalties",
    ),
    Claim(
        id="L5",
        paper="tangent",
        where="abstract",
        statement=(
            "The update matrices of the structured adaptive solution have a lower effective rank than those "
            "of the min-norm tangent solution."
        ),
        paper_value="approximately low rank; no number",
        study="adaptive",
    ),
    Claim(
        id="L6",
        paper="tangent",
        where="Fig. 1",
        statement=(
            "On MNIST digits 2 and 3 the kernel of a network trained on the signs of a smooth target ends "
            "more similar to its label kernel than the kernel of one trained on the smooth target itself."
        ),
        paper_value="0.17 (smooth) < 0.40 (sign)",
        study="label-alignment",
    ),
    Claim(
        id="L7",
        paper="tangent",
        where="Thm 1",
        statement=(
            "The stretch s of the adapted direction, and with it the label-kernel term added to the kernel, "
            "never falls as the norm of the min-norm solution grows."
        ),
        paper_value="monotone",
        study="adaptive",
    ),
    Claim(
        id="L8",
        paper="tangent",
        where="Fig. 3",
        statement=(
            "For the sign task the diagonal of the adapted kernel is largest at the difficult points, those "
            "whose smooth target is near zero."
        ),
        paper_value="about 20-32 near zero against 5-8 far from it",
        study="label-alignment",
    ),
    Claim(
        id="L9",
        paper="tangent",
        where="authors' code",
        statement=(
            "Tangent features averaged along the straight line from initial to final parameters reproduce "
            "the learned change of the function much better than the tangent features of any single point on "
            "it."
        ),
        paper_value="exact up to quadrature",
        study="label-alignment",
    ),
    Claim(
        id="L10",
        paper="tangent",
        where="Fig. 4 (arXiv v2)",
        statement=(
            "On small training sets from MNIST and CIFAR-10 a linearised network with adaptive features has "
            "a lower test error than one with fixed features, and both stay far behind the full network."
        ),
        paper_value="error at n = 125: MNIST 0.187 / 0.140 / 0.067, CIFAR-10 0.697 / 0.613 / 0.543",
        study="sample-size",
    ),
    Claim(
        id="L11",
        paper="tangent",
        where="derived (for Props 3, 4 and Lemma 5)",
        statement=(
            "If the penalties on the factors of the feature transformation grow like powers r_1, r_2, ..., "
            "the effective penalty grows like v^q with 1/q = 1/2 + (1/r_1 + 1/r_2 + ...)."
        ),
        paper_value="q = 1, 2/3 and 1/2 for the three penalties of Fig. 2",
        study="penalties",
    ),
)

_BY_ID: dict[str, Claim] = {claim.id: claim for claim in CATALOGUE}


def by_id(claim_id: str) -> Claim:
    """Return the claim with this id, for example "C9"; raise KeyError when there is none."""
    try:
        return _BY_ID[claim_id]
    except KeyError:
        nearest = claim_id.strip().upper()
        hint = f"did you mean {nearest!r}?" if nearest in _BY_ID else f"known ids: {', '.join(_BY_ID)}"
        raise KeyError(f"no claim has the id {claim_id!r}; {hint}") from None
