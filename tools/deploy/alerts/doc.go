// SPDX-License-Identifier: Apache-2.0

// Package alerts has only tests: they evaluate the alerts and the dashboard of deploy as Prometheus does, in a module of
// their own, so that the project does not depend on Prometheus.
package alerts
