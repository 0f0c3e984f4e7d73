#!/bin/bash
# @{summary}
# @{usage}
#   @{submit}
# @{not_run}
# @{few_cores}
# Written by: @{command}
