// SPDX-License-Identifier: Apache-2.0

// Package flowcontrol limits how often a control loop reacts, repairs or logs. The reconcile loop
// and the HTTP servers use it. Its invariant: nothing is lost, only postponed or not repeated;
// every wait and everything it remembers is bounded.
package flowcontrol
