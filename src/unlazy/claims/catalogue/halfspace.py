"""The claims of the half-space paper, and the failure cases and checks named in its published summary."""

from unlazy.claims.catalogue.claim import Claim

HALF_SPACE: tuple[Claim, ...] = (
    # Identities and geometry.
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
    # The circle.
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
    # Relabelled Fashion-MNIST.
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
    # Convolutional and residual networks.
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
    # Its thesis, taken apart.
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
    # Failure cases and further checks.
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
)
