// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"errors"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/agentconfig"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// StatusVersion is the version of Status as JSON: another one means that fields have another meaning.
const StatusVersion = 1

// Status is the state of the active reconciler, as its socket serves it at /v1/status.
type Status struct {
	StatusVersion int       `json:"statusVersion"`
	Version       string    `json:"version"` // of the reconciler
	PID           int       `json:"pid"`     // in its own PID namespace
	Started       time.Time `json:"started"`

	// The settings in force. SettingsErr is why they are not those of SettingsFile as it is now.
	SettingsFile string           `json:"settingsFile"`
	Settings     []config.Setting `json:"settings"`
	SettingsErr  string           `json:"settingsError,omitempty"`
	AgentSource  bool             `json:"agentSource"`          // agent files are a source
	AgentFiles   *AgentFiles      `json:"agentFiles,omitempty"` // as they were read last

	Problems []Problem `json:"problems"` // why the node is not ready
	Warnings []string  `json:"warnings"`

	Interval        time.Duration `json:"interval"` // longest time between two syncs, in nanoseconds
	LastSync        time.Time     `json:"lastSync,omitzero"`
	LastResult      string        `json:"lastResult,omitempty"`
	Repairs         []Repair      `json:"repairs"`      // the latest ones, the newest first
	RepairsTotal    int           `json:"repairsTotal"` // since Started
	Chains          []ChainCount  `json:"chains"`
	ConflistManaged bool          `json:"conflistManaged"`
	EntryInserted   int           `json:"entryInserted"` // how often the conflist manager inserted the plugin entry

	Standbys []Standby `json:"standbys"` // other reconcilers on this node
}

// AgentFiles are the agent files as the reconciler read them, or why they could not be read.
type AgentFiles struct {
	agentconfig.Files
	Warnings []string
	Err      string `json:",omitempty"`
}

// Read returns what agentconfig.Read returned to the reconciler.
func (a *AgentFiles) Read() (agentconfig.Files, error) {
	files := a.Files
	for _, w := range a.Warnings {
		files.Warnings = append(files.Warnings, errors.New(w))
	}
	if a.Err != "" {
		return files, errors.New(a.Err)
	}
	return files, nil
}

// Problem is a reason why the node is not ready.
type Problem struct {
	Reason  reconcile.Reason `json:"reason"`
	Source  string           `json:"source,omitempty"`
	Chain   string           `json:"chain,omitempty"`
	Message string           `json:"message"`
}

// Repair is a sync that found rules changed by other programs.
type Repair struct {
	At         time.Time `json:"at"`
	By         string    `json:"by"` // the last program that changed rules before it
	Chains     []string  `json:"chains"`
	Missing    int       `json:"missing"`
	Unexpected int       `json:"unexpected"`
}

// ChainCount is what the metrics count of a chain of one family, since Started.
type ChainCount struct {
	policy.ChainFamily
	Connections  map[string]uint64 `json:"connections"`            // by action
	GuardPackets map[string]uint64 `json:"guardPackets,omitempty"` // by action
	Resets       uint64            `json:"resets,omitempty"`
}

// Standby is a reconciler that waits until the active one ends.
type Standby struct {
	PID     int       `json:"pid"` // in its own PID namespace
	Version string    `json:"version"`
	Seen    time.Time `json:"seen"` // when it last tried to become active
}
