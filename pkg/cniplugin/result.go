// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/containernetworking/cni/pkg/types/create"
	cniversion "github.com/containernetworking/cni/pkg/version"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
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
	const see = "see what the plugin before ip-masq in the conflist returns"
	var keys map[string]json.RawMessage
	if json.Unmarshal(conf.PrevResult, &keys) != nil {
		return nil, errors.New("prevResult: is no object; " + see)
	}
	var head struct {
		CNIVersion string `json:"cniVersion"`
	}
	var wrong *json.UnmarshalTypeError
	if err := json.Unmarshal(conf.PrevResult, &head); errors.As(err, &wrong) {
		return nil, fmt.Errorf("prevResult: cniVersion has the JSON type %s; %s", wrong.Value, see)
	}
	given := head.CNIVersion
	switch {
	case version == "":
		version = "0.1.0" // what a configuration without a version has
	case given == "" && version != "0.1.0" && version != "0.2.0":
		return nil, errors.New("prevResult: has no cniVersion; " + see)
	}
	if given == "" {
		given = version
	}
	if !slices.Contains(cniversion.All.SupportedVersions(), given) {
		return nil, fmt.Errorf("prevResult: cniVersion is %s, and this ip-masq knows versions up to %s; lower the conflist's cniVersion, or install a newer ip-masq",
			policy.Printable(given), cniversion.Current())
	}
	result, err := create.Create(given, conf.PrevResult)
	if errors.As(err, &wrong) {
		err = fmt.Errorf("%s has the JSON type %s", wrong.Field, wrong.Value)
	}
	if err != nil {
		return nil, fmt.Errorf("prevResult: is not a result of cniVersion %s: %s; %s", given, policy.Printable(err.Error()), see)
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
	return json.Marshal(keys) // indented, each line of a deeply nested value would be as long as that is deep
}
