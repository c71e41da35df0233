// SPDX-License-Identifier: Apache-2.0

// Package release tests the binaries of `make build` before a release: they must be static, so that
// they run on any host and in an empty image; small, because a runtime executes the plugin for each
// pod; and stamped with their version.
package release
