"""The claims of the tangent paper."""

from unlazy.claims.catalogue.claim import Claim

TANGENT: tuple[Claim, ...] = (
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
