// SPDX-License-Identifier: Apache-2.0

// Package deploy tests every manifest below kustomize/: that it is valid, requests only what the
// pods need of a node, and names only existing flags, metrics and images; and that chart/ renders
// the same objects.
package deploy
