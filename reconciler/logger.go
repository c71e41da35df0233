// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// logger writes to stderr. Of the verbosity klog's users know, 2 and more is
// what there is to say of each pass.
func (a *app) logger(s config.Settings) *slog.Logger {
	o := &slog.HandlerOptions{}
	if a.verbose >= 2 {
		o.Level = slog.LevelDebug
	}
	if s.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(a.err, o))
	}
	return slog.New(slog.NewTextHandler(a.err, o))
}
