// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types/create"
)

// passThrough returns the result that ADD answers with: the prevResult, key for
// key as it came, in the version of the configuration (CNI spec, section 4).
func passThrough(netconf []byte, version string) ([]byte, error) {
	var conf struct {
		PrevResult json.RawMessage `json:"prevResult"`
	}
	if err := json.Unmarshal(netconf, &conf); err != nil {
		return nil, fmt.Errorf("prevResult: %w", err)
	}
	if len(conf.PrevResult) == 0 || string(conf.PrevResult) == "null" {
		return nil, errors.New("prevResult: is missing; ip-masq runs after the plugin that makes the interface: " +
			"list it behind that one in the conflist's plugins")
	}
	var keys map[string]json.RawMessage
	var head struct {
		CNIVersion string `json:"cniVersion"`
	}
	if err := errors.Join(json.Unmarshal(conf.PrevResult, &keys), json.Unmarshal(conf.PrevResult, &head)); err != nil {
		return nil, fmt.Errorf("prevResult: is not a result of the plugin before: %w", err)
	}
	if version == "" {
		version = "0.1.0" // what a configuration without a version has
	}
	given := head.CNIVersion
	if given == "" {
		given = version
	}
	result, err := create.Create(given, conf.PrevResult)
	if err != nil {
		return nil, fmt.Errorf("prevResult: is not a result of cniVersion %s: %w", given, err)
	}
	if given != version {
		converted, err := result.GetAsVersion(version)
		if err != nil {
			return nil, fmt.Errorf("prevResult: convert from cniVersion %s to %s: %w", given, version, err)
		}
		var out bytes.Buffer
		err = converted.PrintTo(&out)
		return out.Bytes(), err
	}
	keys["cniVersion"], err = json.Marshal(version)
	if err != nil {
		return nil, err
	}
	return json.MarshalIndent(keys, "", "    ")
}
