// SPDX-License-Identifier: Apache-2.0

// Package oci writes container images as OCI archives: a tar of an OCI image
// layout (OCI Image Format Specification 1.0, image-layout.md), which
// `ctr images import`, `podman load` and `skopeo copy oci-archive:` take. It needs
// no registry, no daemon and no other program. Its invariant: the same images give
// the same bytes, on every machine and at any time.
//
// The program deploy/image and the tests may import it; the two binaries may not.
package oci
