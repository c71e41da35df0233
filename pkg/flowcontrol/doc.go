// SPDX-License-Identifier: Apache-2.0

// Package flowcontrol limits how often a control loop reacts, repairs or logs. Each loop of the
// reconciler uses it, and each server. Its invariant: nothing is lost, only postponed or not
// repeated; every wait and everything it remembers is bounded.
package flowcontrol
