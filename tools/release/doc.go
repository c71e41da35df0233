// SPDX-License-Identifier: Apache-2.0

// Package release holds what every binary that `make build` leaves in bin/ must
// satisfy before it may be copied to a node: static, so that it runs on any host
// and in an empty image; small, because a runtime executes the plugin for each
// pod; stamped, so that it says which version it is. The package is a test;
// nobody imports it.
package release
