// SPDX-License-Identifier: Apache-2.0

// Package oci writes container images as OCI archives, for deploy/image and tests: a tar of an OCI
// image layout (OCI Image Format Specification 1.0, image-layout.md), which `ctr images import`,
// `podman load` and `skopeo copy oci-archive:` accept. It needs no registry, daemon or other
// program. The same images give the same bytes on every machine and at any time.
package oci
