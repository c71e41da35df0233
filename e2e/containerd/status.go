// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"context"
	"encoding/json"
	"fmt"
)

// Condition is a CRI condition from which a kubelet derives the node's readiness.
type Condition struct {
	Type    string
	Status  bool
	Message string
}

// NetworkReady returns the current condition of the network. containerd 2 calls STATUS for each
// request if the conflist has cniVersion 1.1.0.
func (r *Runtime) NetworkReady(ctx context.Context) (Condition, error) {
	text, err := r.ask(ctx, "info")
	if err != nil {
		return Condition{}, err
	}
	var status struct {
		Status struct{ Conditions []Condition } `json:"status"`
	}
	if err := json.Unmarshal([]byte(text), &status); err != nil {
		return Condition{}, fmt.Errorf("read CRI status: %w: %s", err, text)
	}
	for _, c := range status.Status.Conditions {
		if c.Type == "NetworkReady" {
			return c, nil
		}
	}
	return Condition{}, fmt.Errorf("read CRI status: no condition of the network: %s", text)
}
