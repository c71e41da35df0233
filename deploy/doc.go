// SPDX-License-Identifier: Apache-2.0

// Package deploy holds what every manifest below kustomize/ must satisfy: that it
// is valid, asks a node for what it needs and nothing else, and names only flags,
// metrics and images that there are. The package is a test; nobody imports it.
package deploy
